"""Every error a person can cause, as one line that says where, what, and what to do.

MinigptError            the input or the run was at fault      exit status 1
├── DataError           text, data files, stdin
├── ConfigError         settings that are out of range or contradict each other
├── ModelFolderError    a folder that is no model, or a damaged one
├── TrainingError       a run that cannot go on
└── UsageError          the command line itself is wrong       exit status 2
"""


class MinigptError(Exception):
    """Base of all errors meant for people; its text is one line without a trailing period."""

    exit_status = 1


class DataError(MinigptError):
    """Text or data that is missing, unreadable, malformed or too small; names file and line."""


class ConfigError(MinigptError):
    """A setting out of its range, or two settings that contradict each other; names both values."""


class ModelFolderError(MinigptError):
    """A folder that holds no model, or files in it that are cut short, hostile or do not fit together."""


class TrainingError(MinigptError):
    """A run that cannot go on: a non-finite loss, no memory, no disk space."""


class UsageError(MinigptError):
    """Options or arguments that do not go together on the command line."""

    exit_status = 2
