"""The pool: worker processes that run environments, and recovery from their failures."""
