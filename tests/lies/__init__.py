"""The battery of lies: ways to be told a wrong conclusion, planted one by one, each with its honest twin.

`battery` says what a lie is, carries one out and judges it; the other modules hold the lies by kind.
"""
