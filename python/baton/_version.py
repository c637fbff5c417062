"""Version of the package, that of Baton's programs."""

VERSION = "0.2.0"
