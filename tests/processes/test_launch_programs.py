"""`memoire launch`: programs that know nothing of a launcher, started again, and never left behind."""
