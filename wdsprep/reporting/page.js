"use strict";
(() => {
  const controls = document.getElementById("controls");
  if (!controls) return;
  const [search, group, size, previous, next, shown, sheet] =
    ["search", "group", "size", "previous", "next", "shown", "sheet"].map((id) => document.getElementById(id));
  const groups = [...sheet.querySelectorAll(".group")];
  const cards = groups.flatMap((place) => [...place.querySelectorAll(".card")].map((card) => (
    { card, place, text: card.textContent.toLowerCase() }
  )));
  let page = 0;

  const found = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    return cards.filter(({ place, text }) => (
      (!group.value || place.dataset.group === group.value) && words.every((word) => text.includes(word))
    ));
  };

  const show = () => {
    const all = found();
    const each = Number(size.value);
    page = Math.max(0, Math.min(page, Math.ceil(all.length / each) - 1));
    const start = page * each;
    const visible = new Set(all.slice(start, start + each));
    for (const one of cards) one.card.hidden = !visible.has(one);
    for (const place of groups) place.hidden = ![...visible].some((one) => one.place === place);
    shown.value = all.length
      ? `${start + 1} to ${start + visible.size} of ${all.length}`
      : "nothing found";
    previous.disabled = page === 0;
    next.disabled = start + each >= all.length;
  };

  const turn = (by) => {
    page += by;
    show();
    if (controls.getBoundingClientRect().top < 0) controls.scrollIntoView();
    const button = by > 0 ? next : previous;
    if (button.disabled) (by > 0 ? previous : next).focus();
  };

  const restart = () => { page = 0; show(); };
  search.addEventListener("input", restart);
  group.addEventListener("change", restart);
  size.addEventListener("change", restart);
  previous.addEventListener("click", () => turn(-1));
  next.addEventListener("click", () => turn(1));
  controls.hidden = false;
  show();
})();
