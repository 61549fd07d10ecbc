"""The pages of `sweep ui`: a sweep in a browser, live, and what a person may ask of it."""
