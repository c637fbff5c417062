//! Baton's side of `make parity`: reads the files of `scripts/parity/parity.py` and computes everything that PyTorch
//! computes too, for comparison there. Each part has a Python module of the same name, which states what is compared
//! and with which tolerance.

mod case;
mod curves;
mod export;
mod mixing;
mod models;
mod schedules;
mod updates;

use std::{env, path::Path};

use baton_trainer::torch::device;

use self::case::{Case, Named, Result};

/// Computes the results that one part of parity.py compares.
type Part = fn(&Case) -> Result<Named>;

/// The parts by the names of their folders.
const PARTS: [(&str, Part); 7] = [
    ("models", models::results),
    ("programs", models::results),
    ("updates", updates::results),
    ("curves", curves::results),
    ("schedules", schedules::results),
    ("mixing", mixing::results),
    ("export", export::results),
];

fn main() -> Result<()> {
    let work = env::args().nth(1).ok_or("usage: parity FOLDER")?;
    // The same number as in Python, for the same rounding.
    device::set_threads(1);
    for (part, results) in PARTS {
        let folder = Path::new(&work).join(part);
        if !folder.is_dir() {
            continue;
        }
        eprintln!("parity: {part}, Baton");
        for case in Case::all(&folder)? {
            case.write(&results(&case)?)?;
        }
    }
    Ok(())
}
