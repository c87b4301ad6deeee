"""What the logs of a run say, and how it is shown.

From the files to the page: `log` reads the logs into columns, `scores` makes the blocks of `summary.json`,
`comparison` sets runs side by side (with `targets` and `chosen_rounds` for what a comparison may add), `format`
writes numbers, `sheets` makes tables, `render` draws them, `plots` makes pictures and `page` writes the HTML.
Nothing is imported here, because `pictures` and `page` load matplotlib and the others do not need it.
"""
