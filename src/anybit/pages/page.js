"use strict";
// One pair of widths at a time: from the list, or from a cell, a mark or a line that is clicked.
const list = document.getElementById("width");
const show = (bits) => {
  list.value = bits;
  for (const part of document.querySelectorAll("[data-at]")) part.hidden = part.dataset.at !== bits;
  for (const part of document.querySelectorAll("[data-bits]")) part.classList.toggle("now", part.dataset.bits === bits);
};
list.addEventListener("input", () => show(list.value));
document.addEventListener("click", (event) => {
  const part = event.target.closest("[data-bits]");
  if (part) show(part.dataset.bits);
});
show(list.value);
