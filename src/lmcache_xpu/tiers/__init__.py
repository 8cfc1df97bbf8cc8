"""Where chunks outlive LMCache's CPU memory: on disk, and in a server that engines share."""
