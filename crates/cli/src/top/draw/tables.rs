//! Tables of ranks and machines. Columns that do not fit are left out, the least important first.

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
    /// Columns with a higher number are left out first.
    drop_order: u8,
    /// Text of a cell; `None` is content as `-`.
    cell: fn(&T) -> Option<String>,
}

const fn column<T>(
    title: &'static str,
    width: u16,
    drop_order: u8,
    cell: fn(&T) -> Option<String>,
) -> Column<T> {
    Column { title, width, drop_order, cell }
}

const RANK_COLUMNS: [Column<RankStatus>; 14] = [
    column("RANK", 4, 0, |rank| Some(rank.rank.to_string())),
    column("NODE", 11, 3, |rank| Some(clean(&rank.node_id).into_owned())),
    column("STATE", 9, 0, |rank| Some(clean(&rank.state).into_owned())),
    column("ACTIVITY", 17, 4, |rank| {
        let heartbeat = rank.heartbeat.as_ref()?;
        Some(format!("{} {:.1} s", heartbeat.activity().name(), heartbeat.seconds))
    }),
    column("STEP", 7, 6, |rank| Some(rank.heartbeat.as_ref()?.step.to_string())),
    column("S/STEP", 6, 2, |rank| {
        let own = rank.heartbeat.as_ref()?.own_step_seconds;
        (own > 0.0).then(|| format!("{own:.3}"))
    }),
    column("SLOWDOWN", 8, 1, |rank| {
        // A sign, in addition to the colour.
        let sign = if rank.slowdown? >= STRAGGLER_SLOWDOWN { " !" } else { "" };
        Some(format!("{:.1}x{sign}", rank.slowdown?))
    }),
    column("WAIT", 7, 5, |rank| Some(human::percent(rank.loader.as_ref()?.wait))),
    column("QUEUE", 6, 8, |rank| {
        let loader = rank.loader.as_ref()?;
        Some(format!("{}/{}", loader.ready, loader.capacity))
    }),
    column("LAST REPORT", 11, 1, |rank| Some(format!("{:.1} s", rank.heartbeat_age_seconds?))),
    column("GPU", 7, 2, |rank| Some(human::percent(rank.gpu.as_ref()?.utilisation?))),
    column("MEMORY", 7, 3, |rank| {
        let gpu = rank.gpu.as_ref()?;
        Some(human::percent(gpu.memory_used as f64 / gpu.memory_total.max(1) as f64))
    }),
    column("TEMP", 6, 7, |rank| Some(format!("{:.0} °C", rank.gpu.as_ref()?.celsius?))),
    column("POWER", 6, 7, |rank| Some(format!("{:.0} W", rank.gpu.as_ref()?.watts?))),
];
/// Index of the first column about GPUs.
const FIRST_GPU_COLUMN: usize = 10;
/// Slowdown from which a rank is content as a straggler, as a multiple of the median.
const STRAGGLER_SLOWDOWN: f64 = 1.5;
/// Age of the last heartbeat from which a rank is content as silent, seconds.
const STALE_HEARTBEAT_SECONDS: f64 = 5.0;

const MACHINE_COLUMNS: [Column<NodeStatus>; 9] = [
    column("NODE", 13, 0, |node| Some(clean(&node.node_id).into_owned())),
    column("RANKS", 5, 4, |node| Some(node.slots.to_string())),
    column("STATE", 5, 0, |node| Some(if node.attached { "up" } else { "down" }.to_owned())),
    column("CPU OF CORES", 14, 1, |node| {
        let host = node.host.as_ref()?;
        Some(format!("{} of {}", human::percent(host.cpu), host.cpus))
    }),
    column("MEMORY", 20, 1, |node| {
        let host = node.host.as_ref()?;
        let [used, total] = [host.memory_used, host.memory_total].map(human::bytes);
        Some(format!("{used} of {total}"))
    }),
    column("DISK FREE", 10, 2, |node| Some(human::bytes(node.host.as_ref()?.disk_free))),
    column("NETWORK IN, OUT", 24, 3, |node| {
        let host = node.host.as_ref()?;
        let [received, sent] = [host.received_per_second, host.sent_per_second]
            .map(|bytes| human::bytes(bytes as u64));
        Some(format!("{received}/s, {sent}/s"))
    }),
    column("LAST REPORT", 11, 2, |node| Some(format!("{:.1} s", node.heartbeat_age_seconds?))),
    column("RTT", 8, 5, |node| Some(format!("{:.1} ms", 1_000.0 * node.round_trip_seconds?))),
];

/// The columns that fit into the width.
fn fitting_columns<T>(mut columns: Vec<&Column<T>>, width: u16) -> Vec<&Column<T>> {
    let total_width = |columns: &[&Column<T>]| {
        columns.iter().map(|column| usize::from(column.width) + 1).sum::<usize>()
    };
    while total_width(&columns) > usize::from(width) + 1 && columns.len() > 1 {
        let max = columns.iter().map(|column| column.drop_order).max();
        let index = columns.iter().rposition(|column| Some(column.drop_order) == max);
        let Some(index) = index else { break };
        columns.remove(index);
    }
    columns
}

pub(super) fn ranks(frame: &mut Frame<'_>, area: Rect, state: &State, theme: Theme) {
    let empty = GetStatusResponse::default();
    let ranks = &state.job().unwrap_or(&empty).ranks;
    let has_gpus = ranks.iter().any(|rank| rank.gpu.is_some());
    let columns = if has_gpus { &RANK_COLUMNS[..] } else { &RANK_COLUMNS[..FIRST_GPU_COLUMN] };
    let style = |rank: &RankStatus| {
        let is_silent =
            rank.heartbeat_age_seconds.is_some_and(|age| age >= STALE_HEARTBEAT_SECONDS);
        match rank.state.as_str() {
            _ if is_silent => theme.bad(),
            "gone" | "unknown" => theme.bad(),
            _ if rank.slowdown.is_some_and(|slowdown| slowdown >= STRAGGLER_SLOWDOWN) => {
                theme.warning()
            }
            _ => Style::new(),
        }
    };
    let count = ranks.len();
    let title = match count {
        0 => " Ranks ".to_owned(),
        _ => format!(" Ranks {} of {count} ", state.selected + 1),
    };
    let selected = Some(state.selected);
    table(
        frame,
        area,
        TableContent { title, pane: Pane::Ranks, rows: ranks, columns, selected, first: 0 },
        style,
        state,
        theme,
    );
}

pub(super) fn machines(frame: &mut Frame<'_>, area: Rect, state: &State, theme: Theme) {
    let empty = GetStatusResponse::default();
    let nodes = &state.job().unwrap_or(&empty).nodes;
    let style = |node: &NodeStatus| if node.attached { Style::new() } else { theme.bad() };
    let title = format!(" Machines {} ", nodes.len());
    let first = state.scrolled[Pane::Machines as usize].min(nodes.len().saturating_sub(1));
    let columns = &MACHINE_COLUMNS[..];
    let content =
        TableContent { title, pane: Pane::Machines, rows: nodes, columns, selected: None, first };
    table(frame, area, content, style, state, theme);
}

/// Content of a table.
struct TableContent<'a, T> {
    title: String,
    pane: Pane,
    rows: &'a [T],
    columns: &'a [Column<T>],
    /// Index of the selected row, which is kept visible.
    selected: Option<usize>,
    /// Index of the first row content.
    first: usize,
}

fn table<T>(
    frame: &mut Frame<'_>,
    area: Rect,
    content: TableContent<'_, T>,
    style: impl Fn(&T) -> Style,
    state: &State,
    theme: Theme,
) {
    let block = block(content.title, Some(content.pane), state, theme);
    let columns = fitting_columns(content.columns.iter().collect(), block.inner(area).width);
    let cell = |column: &Column<T>, row| (column.cell)(row).unwrap_or_else(|| "-".to_owned());
    let rows = content
        .rows
        .iter()
        .map(|row| Row::new(columns.iter().map(|column| cell(column, row))).style(style(row)));
    let widths = columns.iter().map(|column| Constraint::Length(column.width));
    let header = Row::new(columns.iter().map(|column| column.title)).style(theme.dim());
    let table =
        Table::new(rows, widths).header(header).block(block).row_highlight_style(theme.selected());
    let mut position = TableState::new().with_offset(content.first).with_selected(content.selected);
    frame.render_stateful_widget(table, area, &mut position);
}
