"""Tools: environments in TRL's style, a class with tool methods and `get_reward`, as `TextEnvironment`s."""
