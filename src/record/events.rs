//! Events of `tracing`: what happens once or seldom, and calls of MPI. `MPI4JAX_LOG` selects which
//! events are written.
//!
//! A line is written in one piece, by the thread that has the event, without Python. What an abort prints (the recorder's
//! operations, the watchdog's reports) are no events, because nothing may stand between it and its file.

use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Map, Value, json};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

use super::clock;
use crate::comm::Group;
use crate::error::Cause;
use crate::mpilib;

const LOG: &str = "MPI4JAX_LOG";
const FORMAT: &str = "MPI4JAX_LOG_FORMAT";

/// The target of calls of MPI.
pub const OP: &str = "mpi4jax::op";
/// What all targets begin with, and what settings leave out.
const PREFIX: &str = "mpi4jax::";
/// `op`: calls; `transport`: what was chosen, started and connected, memory for copies; `comm`: communicators; `library`:
/// libraries that were looked for.
const TARGETS: &[&str] = &["op", "transport", "comm", "library"];

/// Whether calls are written to standard output, as `MPI4JAX_DEBUG` has it.
static IS_DEBUG: AtomicBool = AtomicBool::new(false);
/// Whether calls are events, as `MPI4JAX_LOG` has it.
static IS_LOGGED: AtomicBool = AtomicBool::new(false);
/// Whether calls are written in one of the two ways.
static IS_WANTED: AtomicBool = AtomicBool::new(false);

/// Whether calls are written anywhere. If not, this check is all that they cost.
#[inline]
pub fn wants_calls() -> bool {
    IS_WANTED.load(Ordering::Relaxed)
}

/// Switches the lines of `MPI4JAX_DEBUG`.
#[cfg_attr(feature = "python", pyo3::pyfunction(name = "set_debug"))]
pub fn set_debug(is_debug: bool) {
    IS_DEBUG.store(is_debug, Ordering::Relaxed);
    IS_WANTED.store(is_debug || IS_LOGGED.load(Ordering::Relaxed), Ordering::Relaxed);
}

#[cfg_attr(feature = "python", pyo3::pyfunction(name = "get_debug"))]
pub fn is_debug() -> bool {
    IS_DEBUG.load(Ordering::Relaxed)
}

/// Which events a setting asks for: a level, or levels of targets.
fn parse(setting: &str) -> Result<Targets, Cause> {
    let wrong = || Cause::Setting {
        message: format!(
            "{LOG}={setting} is not understood: expected a level (error, warn, info, debug, trace, off), or levels of \
             some of {}, like transport=debug,library=info",
            TARGETS.join(", ")
        ),
    };
    let mut targets = Targets::new();
    for part in setting.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let (name, level) = match part.split_once('=') {
            None => (PREFIX.into(), part),
            Some((name, level)) if TARGETS.contains(&name.trim()) => {
                (format!("{PREFIX}{}", name.trim()), level.trim())
            }
            Some(_) => return Err(wrong()),
        };
        targets = targets.with_target(name, level.parse::<LevelFilter>().map_err(|_| wrong())?);
    }
    Ok(targets)
}

/// Reads the environment. Called once, when the module is loaded.
pub fn init() -> Result<(), Cause> {
    let variable = |name: &str| std::env::var(name).unwrap_or_default().trim().to_ascii_lowercase();
    let wanted = Some(variable(LOG)).filter(|setting| !setting.is_empty());
    let wanted = wanted.map(|setting| parse(&setting)).transpose()?;
    let is_logged = wanted.as_ref().is_some_and(|targets| targets.would_enable(OP, &Level::INFO));
    let is_json = match &*variable(FORMAT) {
        "" | "text" => false,
        "json" => true,
        other => {
            let message = format!("{FORMAT}={other} is not understood: expected text or json");
            return Err(Cause::Setting { message });
        }
    };
    if let Some(targets) = wanted {
        let subscriber = tracing_subscriber::registry().with(Log { is_json }.with_filter(targets));
        // A second one would be another module's of the same library: the first one stays.
        let _ = tracing::subscriber::set_global_default(subscriber);
    }
    IS_LOGGED.store(is_logged, Ordering::Relaxed);
    set_debug(matches!(&*variable("MPI4JAX_DEBUG"), "1" | "true" | "on" | "yes"));
    Ok(())
}

/// The message of an event, and its other fields.
#[derive(Default)]
struct Fields {
    message: String,
    others: Map<String, Value>,
}

impl Fields {
    fn of(event: &Event<'_>) -> Self {
        let mut fields = Self::default();
        event.record(&mut fields);
        fields
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let text = format!("{value:?}");
        if field.name() == "message" {
            self.message = text;
        } else {
            // Numbers, and words in quotes; else plain words.
            let value = serde_json::from_str(&text).unwrap_or(Value::String(text));
            self.others.insert(field.name().into(), value);
        }
    }
}

/// What `MPI4JAX_LOG` asks for, on standard error.
///
/// The format layer of tracing-subscriber would save no code: JSON, and words without quotes, need the visitor of fields with it, too.
struct Log {
    is_json: bool,
}

impl<S: Subscriber> Layer<S> for Log {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let (level, target) = (*event.metadata().level(), event.metadata().target());
        let fields = Fields::of(event);
        let target = target.strip_prefix(PREFIX).unwrap_or(target);
        let time = clock::unix(clock::ticks());
        let make = if self.is_json { as_json } else { as_text };
        let line = make((rank(), time), level, target, fields);
        let _ = std::io::stderr().lock().write_all(line.as_bytes());
    }
}

/// The rank in `MPI_COMM_WORLD`, once MPI can be asked.
fn rank() -> i32 {
    static RANK: OnceLock<i32> = OnceLock::new();
    let asked = || mpilib::is_running().then(|| Group::World.rank().ok()).flatten();
    RANK.get().copied().unwrap_or_else(|| asked().map_or(-1, |rank| *RANK.get_or_init(|| rank)))
}

fn as_json(
    (rank, time): (i32, f64),
    level: Level,
    target: &str,
    Fields { message, others }: Fields,
) -> String {
    let mut line = json!({
        "time": time, "world_rank": rank, "level": level.as_str().to_ascii_lowercase(), "target": target,
        "message": message,
    });
    if let Some(line) = line.as_object_mut() {
        line.extend(others);
    }
    format!("{line}\n")
}

fn as_text(
    (rank, time): (i32, f64),
    level: Level,
    target: &str,
    Fields { message, others }: Fields,
) -> String {
    let (whole, parts) = (time as u64, time.fract());
    let clock = format!(
        "{:02}:{:02}:{:02}.{:03}",
        whole / 3600 % 24,
        whole / 60 % 60,
        whole % 60,
        (parts * 1e3) as u32
    );
    let mut line = format!("r{rank} | {clock} {level} {target} | {message}");
    for (name, value) in others {
        let _ = match value.as_str().filter(|text| !text.contains(' ') && !text.is_empty()) {
            Some(word) => write!(line, " {name}={word}"),
            None => write!(line, " {name}={value}"),
        };
    }
    line.push('\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_levels_and_targets() {
        let all = parse("debug").unwrap();
        assert!(all.would_enable("mpi4jax::comm", &Level::DEBUG) && !all.would_enable(OP, &Level::TRACE));
        assert!(!all.would_enable("another", &Level::ERROR));
        let some = parse("transport=debug, op = info").unwrap();
        assert!(some.would_enable("mpi4jax::transport", &Level::DEBUG));
        assert!(some.would_enable(OP, &Level::INFO) && !some.would_enable(OP, &Level::DEBUG));
        assert!(!some.would_enable("mpi4jax::library", &Level::ERROR));
        for wrong in ["loud", "transport", "pigeon=debug", "op=loud"] {
            let message = parse(wrong).unwrap_err().to_string();
            assert!(message.contains(wrong) && message.contains("transport, comm, library"), "{message}");
        }
    }

    #[test]
    fn lines_are_text_or_json() {
        let fields = || Fields {
            message: "chosen".into(),
            others: [
                ("name".into(), "mpi".into()),
                ("why".into(), "the default".into()),
                ("n".into(), 3.into()),
            ]
            .into_iter()
            .collect(),
        };
        let text = as_text((2, 3723.5), Level::INFO, "transport", fields());
        assert_eq!(text, "r2 | 01:02:03.500 INFO transport | chosen n=3 name=mpi why=\"the default\"\n");
        let line: Value = serde_json::from_str(&as_json((2, 1.5), Level::DEBUG, "comm", fields())).unwrap();
        assert_eq!(
            (&line["level"], &line["message"], &line["n"]),
            (&json!("debug"), &json!("chosen"), &json!(3))
        );
    }
}
