"""What a server answers, a subject a file. Pure: time is passed in, and the dispatcher's lock is held."""
