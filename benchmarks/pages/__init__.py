"""The pages of results: each module renders a part of one, from the JSON documents of a program."""
