"""How training frameworks write a layout: a table of their settings for each framework."""
