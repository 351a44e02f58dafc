"""Files on disk: a server's state folder and snapshots, record files and logs of records, and text logs."""
