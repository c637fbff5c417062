//! Text of others on a terminal: what a reason, a name or a line of a log holds must not steer it.

use std::borrow::Cow;

/// `text` as one line of what can be seen: without the sequences that colour text or move the cursor, other control
/// characters replaced, and without what turns the direction of writing.
pub fn clean(text: &str) -> Cow<'_, str> {
    if !text.chars().any(is_unseen) {
        return Cow::Borrowed(text);
    }
    let mut seen = String::with_capacity(text.len());
    let mut rest = text.chars().peekable();
    while let Some(character) = rest.next() {
        match character {
            '\x1b' if rest.peek() == Some(&'[') => {
                rest.next();
                // ECMA-48, 5.4: a control sequence goes on to its first byte from `@` to `~`.
                while rest.next_if(|c| (' '..='?').contains(c)).is_some() {}
                rest.next_if(|c| ('@'..='~').contains(c));
            }
            '\t' | '\n' => seen.push(' '),
            character if is_unseen(character) => seen.push('\u{fffd}'),
            character => seen.push(character),
        }
    }
    Cow::Owned(seen)
}

/// Control characters, and those of Unicode that change how the ones after them are shown.
fn is_unseen(character: char) -> bool {
    character.is_control()
        || matches!(character, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_steers_a_terminal_is_left() {
        assert_eq!(clean("rank 3: \x1b[31;1mred\x1b[0m\tend\r"), "rank 3: red end\u{fffd}");
        assert_eq!(
            clean("\x1b]0;title\x07 \u{9b}2J \u{202e}x"),
            "\u{fffd}]0;title\u{fffd} \u{fffd}2J \u{fffd}x"
        );
        assert_eq!(clean("cut \x1b["), "cut ");
        assert_eq!(clean("日本 ≥ 1 µs"), "日本 ≥ 1 µs");
    }
}
