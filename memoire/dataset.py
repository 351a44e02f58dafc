"""Episodes of a memory in a file: `save`, `load` and `fill`, and what is in a file, `about` and `episodes`."""

from memoire.replay.datafile import About, about, fill, load
from memoire.replay.dataset import Episode, KeptEpisode, episodes, put, walk
from memoire.replay.saving import save

__all__ = ["About", "Episode", "KeptEpisode", "about", "episodes", "fill", "load", "put", "save", "walk"]
