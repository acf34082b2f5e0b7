"""The one exception that means "the user can mend this"."""


class UserError(ValueError):
    """A fault in what the user gave: value, parameter, file or machine set-up.

    The message is a single line that names the value, what is allowed and what to do. Commands print
    it without a traceback and exit with status 2; nodes log it and refuse the transition.
    """
