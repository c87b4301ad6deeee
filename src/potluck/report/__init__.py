"""What a run says: `views` scores its logs, `table`, `plots` and `page` show them.

`views` and `table` are light; `plots` and `page` load matplotlib, so nothing is imported here.
"""
