"""Advice from live traffic: what other pools and block sizes would have done, and which prompts stand in their own way.

Standard library only.
"""
