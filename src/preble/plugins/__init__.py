"""Code of users: classes named as `module:Class`, or by the entry points of installed packages; policies by name."""
