"""The one exception for mistakes a user can mend."""


class UserError(Exception):
    """One line that says what is wrong, where, and what to do. Shown without a traceback, exit status 1."""
