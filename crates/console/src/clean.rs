//! Makes untrusted text safe to print: a reason, a name, a path or a log line must not control the terminal.

use std::borrow::Cow;

/// `text` as one visible line: without the sequences that colour text or move the cursor, and with other control
/// characters and those that change the writing direction replaced.
pub fn clean(text: &str) -> Cow<'_, str> {
    if !text.chars().any(is_unsafe_to_print) {
        return Cow::Borrowed(text);
    }
    let mut cleaned = String::with_capacity(text.len());
    let mut rest = text.chars().peekable();
    while let Some(character) = rest.next() {
        match character {
            '\x1b' if rest.peek() == Some(&'[') => {
                rest.next();
                // ECMA-48, 5.4: a control sequence ends with its first byte from `@` to `~`.
                while rest.next_if(|c| (' '..='?').contains(c)).is_some() {}
                rest.next_if(|c| ('@'..='~').contains(c));
            }
            '\t' | '\n' => cleaned.push(' '),
            character if is_unsafe_to_print(character) => cleaned.push('\u{fffd}'),
            character => cleaned.push(character),
        }
    }
    Cow::Owned(cleaned)
}

/// As [`clean`], for a text of several lines: newlines and tabs stay.
pub fn lines(text: &str) -> Cow<'_, str> {
    if !text.chars().any(is_unsafe_in_lines) {
        return Cow::Borrowed(text);
    }
    let is_kept = |c: char| matches!(c, '\n' | '\t');
    let pieces = text.split_inclusive(is_kept).map(|piece| {
        let content = piece.trim_end_matches(is_kept);
        [&*clean(content), &piece[content.len()..]].concat()
    });
    Cow::Owned(pieces.collect())
}

/// JSON with unsafe characters as escapes: the same value for a program, and safe for a terminal. Only strings contain
/// such characters; newlines are between values.
pub fn json(text: String) -> String {
    if !text.chars().any(is_unsafe_in_lines) {
        return text;
    }
    let escaped = text.chars().map(|character| match character {
        // All of them are in the range of four digits.
        character if is_unsafe_in_lines(character) => format!("\\u{:04x}", u32::from(character)),
        character => character.to_string(),
    });
    escaped.collect()
}

fn is_unsafe_in_lines(character: char) -> bool {
    is_unsafe_to_print(character) && !matches!(character, '\n' | '\t')
}

/// Whether this is a control character, or a Unicode character that changes how the following text is shown.
fn is_unsafe_to_print(character: char) -> bool {
    character.is_control()
        || matches!(character, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_sequences_are_removed() {
        assert_eq!(clean("rank 3: \x1b[31;1mred\x1b[0m\tend\r"), "rank 3: red end\u{fffd}");
        assert_eq!(
            clean("\x1b]0;title\x07 \u{9b}2J \u{202e}x"),
            "\u{fffd}]0;title\u{fffd} \u{fffd}2J \u{fffd}x"
        );
        assert_eq!(clean("cut \x1b["), "cut ");
        assert_eq!(clean("日本 ≥ 1 µs"), "日本 ≥ 1 µs");
    }

    #[test]
    fn lines_keep_their_layout() {
        assert_eq!(lines("a\n\tb\n\n"), "a\n\tb\n\n");
        assert_eq!(lines("a\x1b[2J\n\t\u{9b}b\n\nc\r"), "a\n\t\u{fffd}b\n\nc\u{fffd}");
        assert_eq!(lines("cut \x1b[\nnext"), "cut \nnext", "a sequence ends with its line");
    }

    #[test]
    fn json_keeps_its_value() {
        let text = "{\n  \"name\": \"a\u{9b}\u{7f}\u{202e}é\"\n}";
        let expected = "{\n  \"name\": \"a\\u009b\\u007f\\u202eé\"\n}";
        assert_eq!(json(text.to_owned()), expected);
    }
}
