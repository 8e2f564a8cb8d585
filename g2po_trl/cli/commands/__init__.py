"""Commands: the commands of `g2po`, one file each."""
