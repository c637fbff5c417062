// Small helpers for the document. Texts become text nodes, never markup: names, reasons and log lines come from others.

export const byId = (id) => document.getElementById(id);

/** An element with attributes and children; a child that is no node becomes text. */
export const element = (tag, attributes = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
};

/** Sets a text, and leaves the document alone if it stands there already. */
export const setText = (node, text) => {
  if (node.textContent !== text) node.textContent = text;
};

export const show = (node, isShown) => {
  if (node.hidden === isShown) node.hidden = !isShown;
};

/**
 * Fills a table. Columns are {head, cell, number, mark, node}: `cell` makes an item's text, `mark` a word that the style
 * knows (bad, warn) or nothing, and `node`, instead of `cell`, an element that is made anew each time.
 */
export const fillTable = (table, caption, columns, items) => {
  setText(table.caption, caption);
  const heads = columns.map((column) => column.head);
  if (table.dataset.heads !== heads.join("|")) {
    table.dataset.heads = heads.join("|");
    const cells = columns.map(({ head, number }) =>
      element("th", number ? { scope: "col", class: "number" } : { scope: "col" }, head));
    table.tHead.replaceChildren(element("tr", {}, ...cells));
    table.tBodies[0].replaceChildren();
  }
  const body = table.tBodies[0];
  while (body.rows.length > items.length) body.deleteRow(-1);
  items.forEach((item, index) => {
    const row = body.rows[index] ?? newRow(body, columns);
    columns.forEach((column, place) => fillCell(row.cells[place], column, item));
  });
};

const newRow = (body, columns) => {
  const row = body.insertRow();
  for (const { number } of columns) row.insertCell().className = number ? "number" : "";
  return row;
};

const fillCell = (cell, { cell: text, node, mark }, item) => {
  if (node) cell.replaceChildren(node(item));
  else setText(cell, text(item));
  const word = mark?.(item) ?? "";
  if ((cell.dataset.mark ?? "") !== word) cell.dataset.mark = word;
};
