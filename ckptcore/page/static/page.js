// The pages work without this file. It adds: "/" goes to the search field, a question before each change, a graph that
// begins at its checkpoint, the digits of an id or a digest are copied by a click, and lists are cards on a phone.
"use strict";
document.addEventListener("keydown", (event) => {
  const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
  if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    document.getElementById("q").focus();
  }
});
for (const form of document.querySelectorAll("form[data-ask]")) {
  form.addEventListener("submit", (event) => {
    if (!window.confirm(form.dataset.ask)) event.preventDefault();
  });
}
for (const button of document.querySelectorAll("button[data-copy]")) {
  button.hidden = !navigator.clipboard;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(button.dataset.copy);
    button.textContent = "copied";
  });
}
// Of the boxes for a comparison, two can be ticked.
const boxes = [...document.querySelectorAll("input[data-pick]")];
for (const box of boxes) {
  box.addEventListener("change", () => {
    const ticked = boxes.filter((each) => each.checked);
    if (ticked.length > 2) ticked.find((each) => each !== box).checked = false;
    const pair = boxes.filter((each) => each.checked).map((each) => each.value);
    for (const form of document.querySelectorAll("form[data-compare]")) {
      form.elements.left.value = pair[0] || "";
      form.elements.right.value = pair[1] || "";
      form.querySelector("button").disabled = pair.length !== 2;
    }
  });
}
// A long lineage begins at the checkpoint of the page, not at its first ancestor.
for (const here of document.querySelectorAll("svg.lineage rect.here")) {
  const frame = here.closest(".scroll");
  const box = here.getBoundingClientRect();
  frame.scrollLeft += box.left - frame.getBoundingClientRect().left - (frame.clientWidth - box.width) / 2;
}
// On a phone a row of a list is a card (page.css): each cell has the head of its column, and one box around its content.
for (const table of document.querySelectorAll("table.rows")) {
  const heads = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
  table.classList.add("cards");
  for (const row of table.tBodies[0].rows) {
    if (row.cells.length !== heads.length) continue;
    [...row.cells].forEach((cell, n) => {
      const box = document.createElement("div");
      box.className = "cell";
      box.append(...cell.childNodes);
      cell.append(box);
      cell.dataset.head = heads[n];
      cell.classList.toggle("empty", box.textContent.trim() === "-");
    });
  }
}
