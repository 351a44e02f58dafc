"""Episodes of a memory in a file: `save`, `load` and `fill`, and what is in a file, `about` and `episodes`."""

from memoire.replay.dataset import About, Episode, KeptEpisode, about, episodes, fill, load, put, save, walk

__all__ = ["About", "Episode", "KeptEpisode", "about", "episodes", "fill", "load", "put", "save", "walk"]
