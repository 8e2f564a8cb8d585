"""The commands of `g2po`, one file each."""
