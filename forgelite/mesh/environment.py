"""Environment variables that must be there before Monarch is imported, and those of every child. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping

# A dead process is noticed after one poll: 10 s is Monarch's default, too long for a run that has lost a station.
SUPERVISION = {
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "500ms",
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": "20s",
    "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": "20s",
}

# torchstore sets this one at import, with a warning in every process, unless it is there already.
FRAMES = {"HYPERACTOR_CODEC_MAX_FRAME_LENGTH": "910737418240"}


# From so many bytes on (64 KiB) glibc's memmove writes around the cache. Its own threshold is three quarters of the
# last-level cache, which on a server is larger than any tensor: then every line that is about to be overwritten is read
# first, and a copy of weights takes twice as long. Other processors and other C libraries ignore it.
COPIES = {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x10000"}


def root_environment(current: Mapping[str, str]) -> dict[str, str]:
    """What the controller adds to its own environment before it imports Monarch; what the user has set stays."""
    wanted = {**SUPERVISION, **FRAMES, "OMP_NUM_THREADS": "1"}
    return {name: value for name, value in wanted.items() if name not in current}


def station_environment(*, cpu_threads: int = 1, **station: str) -> dict[str, str]:
    """The environment of a station's processes: no hub, fast copies, and what the station needs.

    Args:
        cpu_threads: OpenMP threads of each process. One is right for small models: threads that spin on shared cores
            made a step 40 times slower.
        station: what this station needs besides.
    """
    return {
        "OMP_NUM_THREADS": str(cpu_threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Engines warn of their own dependencies while they are imported, and Python when it cleans up after a killed
        # process: nothing that a user could act on.
        "PYTHONWARNINGS": "ignore::FutureWarning,ignore::UserWarning:multiprocessing.resource_tracker",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **SUPERVISION,
        **FRAMES,
        **COPIES,
        **station,
    }
