"""The loop that connects the stations. `loop.py` opens with the picture."""

from forgelite.loop.loop import Loop as Loop
from forgelite.loop.stations import Observer as Observer
from forgelite.loop.stations import PolicyStation as PolicyStation
from forgelite.loop.stations import TrainerStation as TrainerStation
from forgelite.loop.stations import Usage as Usage
