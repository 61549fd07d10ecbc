"""The extra of packages that reports and pictures as files need, and how to install it."""

INSTALL_IT = (
    "which is not installed: pip install -c constraints.txt 'layout-sweep[report]', before a sweep"
    " begins or in another environment: a new package changes the fingerprint of a program that"
    " uses this Python"
)
