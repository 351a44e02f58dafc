"""Episodes of a memory in a file: `save`, `load` and `fill`, and what is in a file, `read_summary` and
`episodes`.
"""

from memoire.replay.datafile import About, fill, load, read_summary
from memoire.replay.dataset import Episode, KeptEpisode, episodes, put, walk
from memoire.replay.saving import save

__all__ = ["About", "Episode", "KeptEpisode", "episodes", "fill", "load", "put", "read_summary", "save", "walk"]
