// A table is sorted by the column whose head is pressed, with the mouse or the keyboard; rows without a value stay last.
const value = (row, place) => row.cells[place].dataset.key;
const compare = (a, b) => isNaN(a) || isNaN(b) ? a.localeCompare(b, "en", {numeric: true}) : a - b;

function sort(head) {
  const body = head.closest("table").tBodies[0], place = head.cellIndex;
  const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
  const known = [...body.rows].filter(row => value(row, place) !== "");
  const empty = [...body.rows].filter(row => value(row, place) === "");
  known.sort((a, b) => sign * compare(value(a, place), value(b, place)));
  body.append(...known, ...empty);
}

for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => sort(button.parentElement));
}

// What is folded on the screen is shown on paper.
let opened = [];
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll("details:not([open])")];
  for (const part of opened) part.open = true;
});
addEventListener("afterprint", () => {
  for (const part of opened) part.open = false;
});
