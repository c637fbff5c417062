//! A state and an area become a frame. Pure.

mod charts;
mod header;
mod panes;
mod tables;

use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::Style,
    text::{Line, Span},
    widgets::{Block, BorderType, Clear, Paragraph, Wrap},
};

use super::{
    state::{Pane, State, Wish},
    theme::Theme,
};

/// Below this, nothing can be shown that is of use.
const LEAST: (u16, u16) = (60, 16);
/// From here on, everything is shown at once.
const WHOLE: (u16, u16) = (140, 40);

/// Draws everything.
pub(super) fn draw(frame: &mut Frame<'_>, state: &State, theme: Theme) {
    let area = frame.area();
    if area.width < LEAST.0 || area.height < LEAST.1 {
        let (columns, rows) = LEAST;
        let text = format!("baton top needs {columns} x {rows} characters; q leaves");
        frame.render_widget(text, area);
        return;
    }
    let whole = area.width >= WHOLE.0 && area.height >= WHOLE.1;
    let header = Constraint::Length(header::HEIGHT);
    let [top, middle, bottom] =
        Layout::vertical([header, Constraint::Min(0), Constraint::Length(1)]).areas(area);
    header::draw(frame, top, state, theme);
    if whole {
        all_panes(frame, middle, state, theme)
    } else {
        one_pane(frame, middle, state, theme)
    }
    footer(frame, bottom, state, theme);
    if let Some(wish) = state.question {
        question(frame, wish, theme);
    } else if state.help {
        help(frame, theme);
    }
}

/// The chosen pane below the names of all.
fn one_pane(frame: &mut Frame<'_>, area: Rect, state: &State, theme: Theme) {
    let [names, rest] = Layout::vertical([Constraint::Length(1), Constraint::Min(0)]).areas(area);
    let name = |pane: Pane| {
        let style = if pane == state.pane { theme.chosen() } else { theme.dim() };
        [Span::styled(format!(" {} ", pane.title()), style), Span::raw(" ")]
    };
    frame.render_widget(Line::from_iter(Pane::ALL.into_iter().flat_map(name)), names);
    match state.pane {
        Pane::Curves => {
            let rows = Layout::vertical([Constraint::Fill(1); 2]).areas::<2>(rest);
            let cells =
                rows.map(|row| Layout::horizontal([Constraint::Fill(1); 2]).areas::<2>(row));
            charts::draw(frame, cells.as_flattened(), state, theme);
        }
        Pane::Ranks => tables::ranks(frame, rest, state, theme),
        Pane::Machines => tables::machines(frame, rest, state, theme),
        Pane::Job => panes::job(frame, rest, state, theme),
        Pane::Log => {
            let [events, log] =
                Layout::vertical([Constraint::Fill(1), Constraint::Fill(2)]).areas(rest);
            panes::events(frame, events, state, theme);
            panes::log(frame, log, state, theme);
        }
    }
}

/// All panes; the chosen one is what the arrow keys move.
fn all_panes(frame: &mut Frame<'_>, area: Rect, state: &State, theme: Theme) {
    let share = |parts| [Constraint::Fill(parts)];
    let [curves, middle, bottom] =
        Layout::vertical([share(5), share(6), share(5)].concat()).areas(area);
    let cells = Layout::horizontal([Constraint::Fill(1); 4]).areas::<4>(curves);
    charts::draw(frame, &cells, state, theme);

    let [left, job] = Layout::horizontal([share(3), share(2)].concat()).areas(middle);
    let nodes = state.job().map_or(0, |status| status.nodes.len());
    // At most a third, but room for one with the borders and the names of the columns.
    let machines = u16::try_from(nodes).unwrap_or(u16::MAX).saturating_add(3);
    let machines = Constraint::Length(machines.clamp(4, (left.height / 3).max(4)));
    let [ranks, machines] = Layout::vertical([Constraint::Min(0), machines]).areas(left);
    tables::ranks(frame, ranks, state, theme);
    tables::machines(frame, machines, state, theme);
    panes::job(frame, job, state, theme);

    let [events, log] = Layout::horizontal([share(2), share(3)].concat()).areas(bottom);
    panes::events(frame, events, state, theme);
    panes::log(frame, log, state, theme);
}

/// A border with a title; a strong one around the pane that keys move.
fn block<'a>(
    title: impl Into<Line<'a>>,
    pane: Option<Pane>,
    state: &State,
    theme: Theme,
) -> Block<'a> {
    let is_chosen = pane == Some(state.pane);
    let style = if is_chosen { theme.accent() } else { theme.dim() };
    let border = if is_chosen { BorderType::Thick } else { BorderType::Plain };
    Block::bordered().border_type(border).border_style(style).title(title)
}

/// The answer to what was wanted, or the keys.
fn footer(frame: &mut Frame<'_>, area: Rect, state: &State, theme: Theme) {
    let line = match state.fresh_answer() {
        Some(Ok(done)) => Line::styled(format!(" {done}"), theme.good()),
        Some(Err(why)) => {
            Line::styled(format!(" not done: {}", crate::clean::clean(why)), theme.bad())
        }
        None => {
            let keys = [
                ("c", "checkpoint"),
                ("p", "pause"),
                ("d", "drain"),
                ("f", "rank's log"),
                ("Tab", "panes"),
                ("?", "help"),
                ("q", "quit"),
            ];
            let shown = |(key, what)| {
                [Span::styled(format!(" {key}"), theme.accent()), Span::raw(format!(" {what} "))]
            };
            Line::from_iter(keys.into_iter().flat_map(shown))
        }
    };
    frame.render_widget(line, area);
}

fn question(frame: &mut Frame<'_>, wish: Wish, theme: Theme) {
    let text = vec![
        Line::raw(wish.question()),
        Line::default(),
        Line::from_iter([
            Span::styled("y", theme.accent()),
            Span::raw(" yes     "),
            Span::styled("n", theme.accent()),
            Span::raw(" no"),
        ]),
    ];
    dialog(frame, " Sure? ", text, theme.warning());
}

fn help(frame: &mut Frame<'_>, theme: Theme) {
    let keys = [
        ("c", "save a checkpoint after the current step"),
        ("p", "let training stand still; go on"),
        ("d", "save after the current step and stop"),
        ("q  Ctrl-C", "leave; the job goes on"),
        ("Tab  1-5", "the next pane; a pane"),
        ("arrows  j k", "move, or scroll"),
        ("PgUp PgDn g G", "by ten; to the ends"),
        ("f  Enter", "the log of the chosen rank; of all"),
        ("?", "this"),
    ];
    let mut text: Vec<Line<'_>> = Vec::new();
    text.extend(keys.map(|(key, what)| {
        Line::from_iter([Span::styled(format!("{key:<15}"), theme.accent()), Span::raw(what)])
    }));
    text.push(Line::default());
    text.push(Line::raw("Dotted upright lines in curves: a later generation went on there."));
    text.push(Line::raw("c, p and d ask before anything is done."));
    dialog(frame, " Keys ", text, theme.accent());
}

/// Text in the middle, over everything.
fn dialog(frame: &mut Frame<'_>, title: &str, text: Vec<Line<'_>>, style: Style) {
    let rows = u16::try_from(text.len()).unwrap_or(u16::MAX);
    let widest = text.iter().map(Line::width).max().unwrap_or_default();
    let columns = u16::try_from(widest).unwrap_or(u16::MAX).saturating_add(4);
    let area = frame.area();
    let area = area.centered(
        Constraint::Length(columns.min(area.width)),
        Constraint::Length(rows.saturating_add(2).min(area.height)),
    );
    let block = Block::bordered().border_type(BorderType::Double).border_style(style).title(title);
    let text = Paragraph::new(text).wrap(Wrap { trim: false });
    frame.render_widget(Clear, area);
    frame.render_widget(text.block(block.padding(ratatui::widgets::Padding::horizontal(1))), area);
}

#[cfg(test)]
mod tests;
