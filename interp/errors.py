"""The one error for a user's mistake: what was asked, what there is, what to do."""


class InputError(ValueError):
    """Input that cannot be used; the message is one line and says how to go on."""
