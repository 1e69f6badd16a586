"""The mixed-skill toy: a model that has learned three answers, and a reward that pays for one of them."""
