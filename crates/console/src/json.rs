//! Results of `--json`: one JSON object in a line.
//!
//! Scripts rely on them: fields are added, never renamed or removed.

use serde::Serialize;

use crate::{clean, output};

/// One line of JSON.
pub fn line(value: &impl Serialize) -> String {
    // Serializing plain structs, strings and numbers cannot fail.
    clean::json(serde_json::to_string(value).unwrap_or_default())
}

/// Prints a result: with `as_json` as one line of JSON, otherwise as the text that `text` returns.
pub fn print<T: Serialize>(as_json: bool, answer: &T, text: impl FnOnce(&T) -> String) {
    output::line(if as_json { line(answer) } else { text(answer) });
}
