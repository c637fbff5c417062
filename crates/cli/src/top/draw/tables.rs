//! Ranks and machines, a row each; columns that have no room are left out, the least important first.

use baton_proto::v1::{GetStatusResponse, NodeStatus, RankStatus};
use ratatui::{
    Frame,
    layout::{Constraint, Rect},
    style::Style,
    widgets::{Row, Table, TableState},
};

use super::block;
use crate::{
    clean::clean,
    human,
    top::{
        state::{Pane, State},
        theme::Theme,
    },
};

struct Column<T> {
    title: &'static str,
    width: u16,
    /// Columns with greater ones go first.
    spare: u8,
    cell: fn(&T) -> String,
}

const fn column<T>(
    title: &'static str,
    width: u16,
    spare: u8,
    cell: fn(&T) -> String,
) -> Column<T> {
    Column { title, width, spare, cell }
}

/// `-` for what is not told.
fn or_dash(told: Option<String>) -> String {
    told.unwrap_or_else(|| "-".to_owned())
}

const RANK: [Column<RankStatus>; 14] = [
    column("RANK", 4, 0, |rank| rank.rank.to_string()),
    column("NODE", 12, 3, |rank| clean(&rank.node_id).into_owned()),
    column("STATE", 9, 0, |rank| clean(&rank.state).into_owned()),
    column("DOES", 17, 4, |rank| {
        or_dash(
            rank.pulse
                .as_ref()
                .map(|pulse| format!("{} {:.1} s", pulse.activity().name(), pulse.seconds)),
        )
    }),
    column("STEP", 7, 6, |rank| or_dash(rank.pulse.as_ref().map(|pulse| pulse.step.to_string()))),
    column("S/STEP", 6, 2, |rank| {
        let own = rank.pulse.as_ref().map(|pulse| pulse.own_step_seconds);
        or_dash(own.filter(|seconds| *seconds > 0.0).map(|seconds| format!("{seconds:.3}")))
    }),
    column("SLOW", 6, 1, |rank| {
        // A sign too, for who sees no colours.
        or_dash(rank.slowness.map(|slowness| match slowness >= SLOW {
            true => format!("{slowness:.1}x !"),
            false => format!("{slowness:.1}x"),
        }))
    }),
    column("WAIT", 7, 5, |rank| {
        or_dash(rank.loader.as_ref().map(|loader| human::percent(loader.wait)))
    }),
    column("QUEUE", 6, 8, |rank| {
        or_dash(rank.loader.as_ref().map(|loader| format!("{}/{}", loader.ready, loader.room)))
    }),
    column("HEARD", 6, 1, |rank| {
        or_dash(rank.heartbeat_age_seconds.map(|age| format!("{age:.1} s")))
    }),
    column("GPU", 7, 2, |rank| {
        let gpu = rank.gpu.as_ref();
        or_dash(gpu.and_then(|gpu| gpu.utilisation).map(human::percent))
    }),
    column("MEMORY", 8, 3, |rank| {
        let gpu = rank.gpu.as_ref();
        or_dash(
            gpu.map(|gpu| human::percent(gpu.memory_used as f64 / gpu.memory_total.max(1) as f64)),
        )
    }),
    column("TEMP", 6, 7, |rank| {
        or_dash(
            rank.gpu.as_ref().and_then(|gpu| gpu.celsius).map(|celsius| format!("{celsius:.0} °C")),
        )
    }),
    column("POWER", 6, 7, |rank| {
        or_dash(rank.gpu.as_ref().and_then(|gpu| gpu.watts).map(|watts| format!("{watts:.0} W")))
    }),
];
/// Of them, those of a GPU.
const OF_GPU: usize = 10;
/// From here on a rank holds the others up.
const SLOW: f64 = 1.5;
/// Seconds without a word that are too many.
const SILENT: f64 = 5.0;

const MACHINE: [Column<NodeStatus>; 9] = [
    column("NODE", 14, 0, |node| clean(&node.node_id).into_owned()),
    column("RANKS", 5, 4, |node| node.slots.to_string()),
    column("IS", 4, 0, |node| if node.attached { "here" } else { "away" }.to_owned()),
    column("CPU OF CORES", 14, 1, |node| {
        or_dash(
            node.host.as_ref().map(|host| format!("{} of {}", human::percent(host.cpu), host.cpus)),
        )
    }),
    column("MEMORY", 20, 1, |node| {
        let host = node.host.as_ref();
        or_dash(host.map(|host| {
            format!("{} of {}", human::bytes(host.memory_used), human::bytes(host.memory_total))
        }))
    }),
    column("DISK FREE", 10, 2, |node| {
        or_dash(node.host.as_ref().map(|host| human::bytes(host.disk_free)))
    }),
    column("NETWORK IN, OUT", 24, 3, |node| {
        or_dash(node.host.as_ref().map(|host| {
            let [received, sent] = [host.received_per_second, host.sent_per_second]
                .map(|bytes| human::bytes(bytes as u64));
            format!("{received}/s, {sent}/s")
        }))
    }),
    column("HEARD", 6, 2, |node| {
        or_dash(node.heartbeat_age_seconds.map(|age| format!("{age:.1} s")))
    }),
    column("TRIP", 8, 5, |node| {
        or_dash(node.round_trip_seconds.map(|seconds| format!("{:.1} ms", 1_000.0 * seconds)))
    }),
];

/// The columns for which there is room.
fn that_fit<T>(mut columns: Vec<&Column<T>>, width: u16) -> Vec<&Column<T>> {
    let taken = |columns: &[&Column<T>]| {
        columns.iter().map(|column| usize::from(column.width) + 1).sum::<usize>()
    };
    while taken(&columns) > usize::from(width) + 1 && columns.len() > 1 {
        let most = columns.iter().map(|column| column.spare).max();
        let Some(at) = columns.iter().rposition(|column| Some(column.spare) == most) else { break };
        columns.remove(at);
    }
    columns
}

pub(super) fn ranks(frame: &mut Frame<'_>, area: Rect, state: &State, theme: Theme) {
    let none = GetStatusResponse::default();
    let ranks = &state.job().unwrap_or(&none).ranks;
    let has_gpus = ranks.iter().any(|rank| rank.gpu.is_some());
    let columns = if has_gpus { &RANK[..] } else { &RANK[..OF_GPU] };
    let style = |rank: &RankStatus| {
        let is_silent = rank.heartbeat_age_seconds.is_some_and(|age| age >= SILENT);
        match rank.state.as_str() {
            _ if is_silent => theme.bad(),
            "gone" | "unheard" => theme.bad(),
            _ if rank.slowness.is_some_and(|slowness| slowness >= SLOW) => theme.warning(),
            _ => Style::new(),
        }
    };
    let count = ranks.len();
    let title = match count {
        0 => " Ranks ".to_owned(),
        _ => format!(" Ranks {} of {count} ", state.chosen + 1),
    };
    let marked = Some(state.chosen);
    table(
        frame,
        area,
        Shown { title, pane: Pane::Ranks, rows: ranks, columns, marked, first: 0 },
        style,
        state,
        theme,
    );
}

pub(super) fn machines(frame: &mut Frame<'_>, area: Rect, state: &State, theme: Theme) {
    let none = GetStatusResponse::default();
    let nodes = &state.job().unwrap_or(&none).nodes;
    let style = |node: &NodeStatus| if node.attached { Style::new() } else { theme.bad() };
    let title = format!(" Machines {} ", nodes.len());
    let first = state.scrolled[Pane::Machines as usize].min(nodes.len().saturating_sub(1));
    let columns = &MACHINE[..];
    let shown = Shown { title, pane: Pane::Machines, rows: nodes, columns, marked: None, first };
    table(frame, area, shown, style, state, theme);
}

/// What a table shows.
struct Shown<'a, T> {
    title: String,
    pane: Pane,
    rows: &'a [T],
    columns: &'a [Column<T>],
    /// The row that is chosen; it is kept in sight.
    marked: Option<usize>,
    /// The first row.
    first: usize,
}

fn table<T>(
    frame: &mut Frame<'_>,
    area: Rect,
    shown: Shown<'_, T>,
    style: impl Fn(&T) -> Style,
    state: &State,
    theme: Theme,
) {
    let block = block(shown.title, Some(shown.pane), state, theme);
    let columns = that_fit(shown.columns.iter().collect(), block.inner(area).width);
    let rows = shown
        .rows
        .iter()
        .map(|row| Row::new(columns.iter().map(|column| (column.cell)(row))).style(style(row)));
    let widths = columns.iter().map(|column| Constraint::Length(column.width));
    let header = Row::new(columns.iter().map(|column| column.title)).style(theme.dim());
    let table =
        Table::new(rows, widths).header(header).block(block).row_highlight_style(theme.chosen());
    let mut place = TableState::new().with_offset(shown.first).with_selected(shown.marked);
    frame.render_stateful_widget(table, area, &mut place);
}
