"""How to install the packages of an extra, as messages say it."""


def how_to_install(extra: str) -> str:
    """Return what follows the name of a package that is missing."""
    return (
        f"which is not installed: pip install '.[{extra}]' in the cloned folder, before a sweep"
        " begins or in another environment: a new package changes the fingerprint of a program that"
        " uses this Python"
    )
