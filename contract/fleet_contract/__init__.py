"""What crosses between the rooms: names, wire types, launch flags, hashing, errors.

Everyone may import this package; it imports no room. Only `launch` and `openai` load pydantic, so that the router's data
path can import the rest without it.
"""
