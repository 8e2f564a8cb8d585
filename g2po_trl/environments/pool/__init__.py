"""The pool: worker processes that play environments, and what happens when one fails."""
