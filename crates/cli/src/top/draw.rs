//! Draws a frame of the dashboard's state. Pure functions.

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
    state::{Pane, State, UserAction},
    theme::Theme,
};

/// Minimum size of the terminal, columns and rows.
const MIN_SIZE: (u16, u16) = (60, 16);
/// Size from which all panes are shown at once, columns and rows.
const ALL_PANES_SIZE: (u16, u16) = (140, 40);

/// Draws everything.
pub(super) fn draw(frame: &mut Frame<'_>, state: &State, theme: Theme) {
    let area = frame.area();
    if area.width < MIN_SIZE.0 || area.height < MIN_SIZE.1 {
        let (columns, rows) = MIN_SIZE;
        let text = format!("baton top needs {columns} x {rows} characters; q quits");
        frame.render_widget(text, area);
        return;
    }
    let show_all = area.width >= ALL_PANES_SIZE.0 && area.height >= ALL_PANES_SIZE.1;
    let header = Constraint::Length(header::HEIGHT);
    let [top, middle, bottom] =
        Layout::vertical([header, Constraint::Min(0), Constraint::Length(1)]).areas(area);
    header::draw(frame, top, state, theme);
    if show_all {
        all_panes(frame, middle, state, theme)
    } else {
        one_pane(frame, middle, state, theme)
    }
    footer(frame, bottom, state, theme);
    if let Some(action) = state.question {
        question(frame, action, theme);
    } else if state.help {
        help(frame, theme);
    }
}

/// The selected pane below the names of all panes.
fn one_pane(frame: &mut Frame<'_>, area: Rect, state: &State, theme: Theme) {
    let [names, rest] = Layout::vertical([Constraint::Length(1), Constraint::Min(0)]).areas(area);
    let name = |pane: Pane| {
        let style = if pane == state.pane { theme.selected() } else { theme.dim() };
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

/// All panes; the arrow keys act on the selected one.
fn all_panes(frame: &mut Frame<'_>, area: Rect, state: &State, theme: Theme) {
    let share = |parts| [Constraint::Fill(parts)];
    let [curves, middle, bottom] =
        Layout::vertical([share(5), share(6), share(5)].concat()).areas(area);
    let cells = Layout::horizontal([Constraint::Fill(1); 4]).areas::<4>(curves);
    charts::draw(frame, &cells, state, theme);

    let [left, job] = Layout::horizontal([share(3), share(2)].concat()).areas(middle);
    let nodes = state.job().map_or(0, |status| status.nodes.len());
    // At most a third of the height, but at least room for one machine with borders and header.
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

/// A border with a title; thick around the selected pane.
fn block<'a>(
    title: impl Into<Line<'a>>,
    pane: Option<Pane>,
    state: &State,
    theme: Theme,
) -> Block<'a> {
    let is_selected = pane == Some(state.pane);
    let style = if is_selected { theme.accent() } else { theme.dim() };
    let border = if is_selected { BorderType::Thick } else { BorderType::Plain };
    Block::bordered().border_type(border).border_style(style).title(title)
}

/// The result of the last request, or the keys.
fn footer(frame: &mut Frame<'_>, area: Rect, state: &State, theme: Theme) {
    let line = match state.recent_answer() {
        Some(Ok(done)) => Line::styled(format!(" {done}"), theme.good()),
        Some(Err(why)) => {
            Line::styled(format!(" failed: {}", crate::clean::clean(why)), theme.bad())
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

fn question(frame: &mut Frame<'_>, action: UserAction, theme: Theme) {
    let text = vec![
        Line::raw(action.question()),
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
        ("p", "pause or resume training"),
        ("d", "save after the current step and stop"),
        ("q  Ctrl-C", "quit; the job continues"),
        ("Tab  1-5", "next pane; pane by number"),
        ("arrows  j k", "select or scroll"),
        ("PgUp PgDn g G", "scroll ten rows; to the first or last row"),
        ("f  Enter", "log of the selected rank; of all"),
        ("?", "this help"),
    ];
    let mut text: Vec<Line<'_>> = Vec::new();
    text.extend(keys.map(|(key, what)| {
        Line::from_iter([Span::styled(format!("{key:<15}"), theme.accent()), Span::raw(what)])
    }));
    text.push(Line::default());
    text.push(Line::raw("Dotted vertical lines in curves: a later generation starts there."));
    text.push(Line::raw("c, p and d ask for confirmation."));
    dialog(frame, " Keys ", text, theme.accent());
}

/// A dialog in the middle, over everything else.
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
