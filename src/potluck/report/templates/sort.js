for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => {
  const head = button.parentElement, body = head.closest("table").tBodies[0];
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const key = row => row.cells[head.cellIndex].dataset.key;
  const compare = (a, b) => a === b ? 0 : a === "" ? -1 : b === "" ? 1
    : isNaN(a) || isNaN(b) ? a.localeCompare(b, "en", {numeric: true}) : a - b;
  const rows = [...body.rows].sort((a, b) => compare(key(a), key(b)));
  body.append(...(down ? rows.reverse() : rows));
});
