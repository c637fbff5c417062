//! The only place that prints.

use std::{
    fmt::Display,
    io::{self, ErrorKind, IsTerminal, Write},
    process,
};

use baton_job::exit::{self, Failure};

/// Prints an answer's line. When nobody reads any more (`baton watch | head`), that was all.
pub fn line(text: impl Display) {
    match writeln!(io::stdout(), "{text}") {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => process::exit(i32::from(exit::OK)),
        _ => {}
    }
}

/// Prints a line of a job that goes on whether anybody reads or not.
pub fn tell(text: impl Display) {
    let _ = writeln!(io::stdout(), "{text}");
}

/// Clears the terminal and prints from its top.
pub fn page(text: impl Display) {
    line(format_args!("\x1b[H\x1b[J{text}"));
}

/// Prints a line about a command's progress, beside its answer.
pub fn note(text: impl Display) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Prints why a command failed.
pub fn error(failure: &Failure) {
    let _ = writeln!(io::stderr(), "error: {}", failure.message.replace('\n', " "));
}

/// Asks a person for a yes; `None` where nobody can be asked.
pub fn confirm(question: impl Display) -> Option<bool> {
    if !io::stdin().is_terminal() || !io::stderr().is_terminal() {
        return None;
    }
    let _ = write!(io::stderr(), "{question} [y/N] ");
    let _ = io::stderr().flush();
    let mut answer = String::new();
    let _ = io::stdin().read_line(&mut answer);
    Some(matches!(answer.trim(), "y" | "Y" | "yes"))
}

/// Whether standard output is a screen that a person looks at.
pub fn is_terminal() -> bool {
    io::stdout().is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// Columns of that screen, if there is one.
pub fn width() -> Option<u16> {
    let size = rustix::termios::tcgetwinsize(io::stdout()).ok()?;
    Some(size.ws_col).filter(|columns| *columns > 0)
}

/// Whether to use colours, see <https://no-color.org>.
pub fn is_colourful() -> bool {
    is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}
