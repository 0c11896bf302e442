//! Which threads other than Python's could continue the program: all but those that are known never to run the user's code.

use crate::system::os;
use crate::system::thread::Thread;

/// Libraries whose threads do their own work alone, whatever they do: those of MPI, and of BLAS and OpenMP. Names of files, without
/// what follows.
const POOLS: [&str; 25] = [
    "libmpi",
    "libmpich",
    "libpmpi",
    "libopen-pal",
    "libopen-rte",
    "libpmix",
    "libprrte",
    "libucs",
    "libuct",
    "libucp",
    "libucm",
    "libfabric",
    "libibverbs",
    "librdmacm",
    "libmlx5",
    "libpsm2",
    "libefa",
    "libopenblas",
    "libblis",
    "libgomp",
    "libomp",
    "libiomp5",
    "libmkl_intel_thread",
    "libmkl_gnu_thread",
    "libarmpl_mp",
];
/// The same, by how their names begin or end: NumPy's BLAS, parts of Open MPI, and of Intel MPI's libfabric.
const BEGIN: [&str; 3] = ["libscipy_openblas", "mca_", "libuct_"];
const END: &str = "-fi";
/// Libraries that may be at work on the program, and do nothing of it while they sleep: XLA's and CUDA's.
const WORKERS: [&str; 2] = ["libcuda", "libnccl"];
const WORKERS_IN: [&str; 3] = ["/jaxlib/", "/jax_plugins/", "/jax_cuda"];
/// Threads that libraries have named so, and that do nothing but return memory.
const NAMES: [&str; 1] = ["jemalloc_bg_thd"];
/// How threads of this package are called.
const OURS: &str = "mpi4jax-";

/// The name of a library, without version and the digits that wheels add: `/x/libgomp-a34b3233.so.1.0.0` is `libgomp`.
fn stem(file: &str) -> &str {
    let name = file.rsplit('/').next().unwrap_or(file);
    let name = name.split(".so").next().unwrap_or(name);
    let is_hash = |end: &str| end.len() >= 8 && end.chars().all(|c| c.is_ascii_hexdigit());
    match name.split_once('-') {
        Some((name, end)) if end.split('-').all(is_hash) => name,
        _ => name,
    }
}

/// Whether a thread certainly does not continue the program by itself.
fn is_harmless(thread: &Thread) -> bool {
    let Thread { name, file, .. } = thread;
    if name.starts_with(OURS) || NAMES.contains(&&**name) {
        return true;
    }
    let Some(file) = file else { return false };
    let stem = stem(file);
    let is_pool =
        POOLS.contains(&stem) || BEGIN.iter().any(|begin| stem.starts_with(begin)) || stem.ends_with(END);
    let is_worker = WORKERS.contains(&stem) || WORKERS_IN.iter().any(|folder| file.contains(folder));
    // `faulthandler`'s thread is not registered with Python, and blocks signals; other threads that Python starts do not.
    let is_of_python = stem.starts_with("libpython") || stem.starts_with("python");
    is_pool || (is_worker && thread.sleeps) || (is_of_python && thread.blocks_signals)
}

/// A thread that could continue the program, in words, besides these.
pub fn other(besides: &[i32]) -> Option<String> {
    let Some(threads) = os::threads(besides) else { return Some("threads that cannot be examined".into()) };
    let thread = threads.into_iter().find(|thread| !is_harmless(thread))?;
    Some(match &thread.file {
        Some(file) => format!("a thread of {}", file.rsplit('/').next().unwrap_or(file)),
        None => format!("a thread of a library, named {:?}", thread.name),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_of_which_nothing_is_known_could_go_on() {
        let of = |file: &str| Thread { file: Some(file.into()), name: "python".into(), ..Thread::default() };
        let asleep = |file: &str| Thread { sleeps: true, ..of(file) };
        let named = |name: &str| Thread { name: name.into(), sleeps: true, ..Thread::default() };
        for thread in [
            of("/usr/lib/libmpi.so.40.40.7"),
            of("/v/numpy.libs/libscipy_openblas64_-32a4b2a6.so"),
            of("/v/torch.libs/libgomp-a34b3233.so.1.0.0"),
            of("/usr/lib/openmpi/mca_btl_tcp.so"),
            of("/opt/intel/libtcp-fi.so"),
            asleep("/v/jaxlib/libjax_common.so"),
            named("mpi4jax-watchdo"),
            Thread { blocks_signals: true, ..of("/usr/lib/libpython3.11.so.1.0") },
        ] {
            assert!(is_harmless(&thread), "{thread:?}");
        }
        for thread in [
            asleep("/home/me/libmpi_helper.so"),
            asleep("/v/grpc/_cython/cygrpc.cpython-311-x86_64-linux-gnu.so"),
            asleep("/usr/lib/libpython3.11.so.1.0"),
            of("/v/jaxlib/libjax_common.so"),
            named("python"),
        ] {
            assert!(!is_harmless(&thread), "{thread:?}");
        }
    }
}
