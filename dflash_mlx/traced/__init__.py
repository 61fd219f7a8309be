"""Passes put together once and run again, where a trial on this machine finds that faster."""
