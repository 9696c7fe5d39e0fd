"""Replay: recorded outputs of real models forced through a drafter, step by step. How good are its drafts?"""
