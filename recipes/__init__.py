"""Training scripts and their settings, installed as `g2po_recipes`; `g2po train` and `g2po teach` start them by name.

Any field of a script's `ScriptArguments`, of the trainer's arguments and of TRL's `ModelConfig` is a flag and a YAML
key; flags win. `--resume-from-checkpoint auto` continues the run in `output_dir` if there is one. Exit code 3: the
model was trained and saved, but not pushed to the Hub.
"""
