"""The files that come with the package: those of `streamrl demo`, and the templates of `streamrl init`."""
