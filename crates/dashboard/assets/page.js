// Helpers for the document. Texts become text nodes, never markup: names, reasons and log lines are untrusted.

export const byId = (id) => document.getElementById(id);

/** An element with attributes and children; a child that is not a node becomes text. */
export const element = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
};

/** Sets a text; does not touch the document if the text is the same. */
export const setText = (node, text) => {
  if (node.textContent !== text) node.textContent = text;
};

export const show = (node, isShown) => {
  if (node.hidden === isShown) node.hidden = !isShown;
};

/**
 * Fills a table. Columns are {head, cell, number, mark, node}: `cell` returns an item's text, `mark` the name of a style
 * (bad, warn) or nothing, and `node`, instead of `cell`, a new element.
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
    columns.forEach((column, at) => fillCell(row.cells[at], column, item));
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
  const style = mark?.(item) ?? "";
  if ((cell.dataset.mark ?? "") !== style) cell.dataset.mark = style;
};
