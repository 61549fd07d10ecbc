"""Programs that measure this project. The tests do not run them."""
