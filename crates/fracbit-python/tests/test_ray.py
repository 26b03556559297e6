"""Work dealt to a cluster of Ray. Needs ray, as `fracbit[ray]` brings it; without it all is
skipped, and says so.

The cluster is three machines of Ray on this one, with a processor each.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

from common import DEMO, REPOSITORY, program

import fracbit
from fracbit import _fracbit

HERE = find_spec("ray") is not None
# Ray asks its own service for permission to count its users otherwise.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Rounding that takes some seconds, so that there is a middle.
HOW = {"scheme": "tcq-3", "data_free": True, "sensitivity": "prior", "smoothing": False}
FLAGS = ["--scheme=tcq-3", "--data-free", "--sensitivity=prior", "--no-smoothing"]


def contents(folder):
    """The bytes of every file of a directory, by name."""
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def descendants(of):
    """Processes below another, with their command lines."""
    parents, lines = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                after = (entry / "stat").read_text().rpartition(")")[2].split()
                lines[int(entry.name)] = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                )
                parents[int(entry.name)] = int(after[1])
            except OSError:
                continue
    below, found = {of}, []
    for _ in range(10):
        below |= {pid for pid, parent in parents.items() if parent in below}
    for pid in below - {of}:
        found.append((pid, lines[pid]))
    return found


@unittest.skipUnless(HERE, "wants ray: pip install 'fracbit[ray]'")
class Dealt(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        from ray.cluster_utils import Cluster

        scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(scratch.cleanup)
        cls.home = Path(scratch.name)
        cls.cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
        )
        cls.addClassCleanup(cls.cluster.shutdown)
        cls.nodes = []
        fracbit.quantize(DEMO, cls.home / "alone", **HOW)
        cls.alone = contents(cls.home / "alone")

    def grow(self, workers):
        """Lets the cluster have so many machines that round."""
        while len(self.nodes) > workers:
            self.cluster.remove_node(self.nodes.pop())
        while len(self.nodes) < workers:
            self.nodes.append(self.cluster.add_node(num_cpus=1))
        self.cluster.wait_for_nodes()

    def quantize(self, name, **more):
        out = self.home / name
        fracbit.quantize(DEMO, out, ray=self.cluster.address, **HOW, **more)
        return out

    def killed(self, marks, at=5, what="quantizing"):
        """A progress that kills a process of the cluster, once, in the middle."""
        done = []

        def progress(count, total, doing):
            if doing == what and count * at > total and not done:
                found = [pid for pid, line in descendants(os.getpid()) if marks in line]
                if found:
                    os.kill(found[0], signal.SIGKILL)
                    done.append(found[0])

        return progress, done

    def test_bytes_do_not_depend_on_the_number_of_workers(self):
        for workers in (1, 2, 3):
            self.grow(workers)
            self.assertEqual(contents(self.quantize(f"by-{workers}")), self.alone, workers)

    def test_bytes_of_calibrated_models_are_the_same(self):
        self.grow(3)
        text = self.home / "text.txt"
        text.write_text((DEMO / "stories.txt").read_text()[:4000])
        stats = self.home / "stats"
        done = program("calibrate", DEMO, "-o", stats, "--text", text, "--tokens=512")
        self.assertEqual(done.returncode, 0, done.stderr)
        how = {
            "scheme": "tcq-3",
            "sensitivity": "prior",
            "calibration": stats,
            "rotation": "online",
        }
        fracbit.quantize(DEMO, self.home / "calibrated", **how)
        fracbit.quantize(DEMO, self.home / "dealt", ray=self.cluster.address, **how)
        self.assertEqual(contents(self.home / "dealt"), contents(self.home / "calibrated"))

    def calibrate(self, name, **more):
        out = self.home / name
        text = self.home / "long.txt"
        stories = (DEMO / "stories.txt").read_text()
        text.write_text(stories * (1 + 130_000 // len(stories)))
        return fracbit.calibrate(DEMO, out, text, tokens=34_000, ctx=128, **more)

    def test_calibrations_have_the_bytes_of_one_process(self):
        """Three shards: on one, two and three workers, with one killed in the middle, with a
        machine lost and its hidden states, and stopped and continued with the cluster and
        without."""
        self.assertGreater(self.calibrate("by-itself").tokens, 32_768)
        alone = contents(self.home / "by-itself")
        for workers in (1, 2, 3):
            self.grow(workers)
            self.calibrate(f"shards-{workers}", ray=self.cluster.address)
            self.assertEqual(contents(self.home / f"shards-{workers}"), alone, workers)
        progress, done = self.killed("ray::_make", what="calibrating")
        self.calibrate("shards-killed", ray=self.cluster.address, progress=progress)
        self.assertEqual(contents(self.home / "shards-killed"), alone)
        self.assertTrue(done, "one was killed")
        lost = []

        def lose(count, total, what):
            if what == "calibrating" and 5 * count > total and not lost:
                lost.append(self.nodes.pop())
                self.cluster.remove_node(lost[0], allow_graceful=False)

        self.calibrate("shards-lost", ray=self.cluster.address, progress=lose)
        self.assertEqual(contents(self.home / "shards-lost"), alone)
        self.assertTrue(lost, "one was lost")
        for name, cluster in (("with-it", self.cluster.address), ("without-it", None)):

            def stop(count, total, what):
                if what == "calibrating" and 3 * count > total:
                    raise KeyboardInterrupt

            with self.assertRaises(KeyboardInterrupt):
                self.calibrate(name, ray=self.cluster.address, progress=stop)
            self.assertFalse((self.home / name).exists(), "nothing under the final name")
            self.calibrate(name, ray=cluster, resume=True)
            self.assertEqual(contents(self.home / name), alone)

    def test_a_worker_that_is_killed_is_replaced(self):
        self.grow(3)
        progress, done = self.killed("ray::_make")
        self.assertEqual(contents(self.quantize("killed", progress=progress)), self.alone)
        self.assertTrue(done, "one was killed")

    def test_a_machine_that_is_lost_is_done_without(self):
        self.grow(3)
        lost = []

        def progress(count, total, what):
            if what == "quantizing" and 5 * count > total and not lost:
                lost.append(self.nodes.pop())
                self.cluster.remove_node(lost[0], allow_graceful=False)

        self.assertEqual(contents(self.quantize("lost", progress=progress)), self.alone)
        self.assertTrue(lost, "one was lost")

    def test_a_run_that_is_stopped_goes_on_with_or_without_the_cluster(self):
        self.grow(2)
        for name, cluster in (("with", self.cluster.address), ("without", None)):
            out = self.home / name

            def stop(count, total, what):
                if what == "quantizing" and 3 * count > total:
                    raise KeyboardInterrupt

            with self.assertRaises(KeyboardInterrupt):
                self.quantize(name, progress=stop)
            self.assertFalse(out.exists(), "nothing under the final name")
            fracbit.quantize(DEMO, out, ray=cluster, resume=True, **HOW)
            self.assertEqual(contents(out), self.alone)

    def test_a_matrix_that_kills_its_workers_is_given_up(self):
        self.grow(2)
        over = threading.Event()

        def kill():
            while not over.is_set():
                for pid, line in descendants(os.getpid()):
                    if line.startswith("ray::_make"):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.01)

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            with self.assertRaisesRegex(fracbit.Error, "part .* was lost 4 times.*--resume"):
                self.quantize("given-up")
        finally:
            over.set()
            killer.join()
        self.assertFalse((self.home / "given-up").exists())
        self.assertEqual(contents(self.quantize("given-up", resume=True)), self.alone)

    def test_refusals_say_what_is_wrong(self):
        with self.assertRaisesRegex(fracbit.ArgumentError, "(?s)--ray: deals matrices.*calibrate"):
            fracbit.quantize(DEMO, self.home / "none", scheme="tcq-3", ray=self.cluster.address)
        with self.assertRaisesRegex(fracbit.ArgumentError, "--sequential"):
            how = {"calibration": "stats", "sequential": True, "scheme": "tcq-3"}
            fracbit.quantize(DEMO, self.home / "none", ray=self.cluster.address, **how)
        done = program("quantize", DEMO, "-o", self.home / "none", *FLAGS, "--ray=127.0.0.1:1")
        self.assertEqual(done.returncode, 1)
        self.assertIn("no cluster answers at 127.0.0.1:1", done.stderr)
        self.assertFalse((self.home / "none").exists())
        job = json.dumps({"version": "0.0.0"})
        with self.assertRaisesRegex(fracbit.ArgumentError, "job: missing field"):
            _fracbit.make_part(job, 0)


class Alone(unittest.TestCase):
    """Parts without a cluster, so without Ray."""

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.home = Path(scratch.name)

    def quantize(self, name, change=bytes):
        """Rounds every matrix by a part, `change` being what happens to it on the way."""

        class Dealer:
            def __init__(self, address):
                self.address = address

            def begin(self, job, first, count, stride):
                self.text = job

            def take(self, index):
                return change(_fracbit.make_part(self.text, index)[0])

            def end(self):
                pass

        line = ["quantize", str(DEMO), "-o", str(self.home / name), *FLAGS, "--ray=here"]
        _fracbit.command(line, None, Dealer)

    def test_parts_make_the_bytes_of_one_process(self):
        fracbit.quantize(DEMO, self.home / "alone", **HOW)
        self.quantize("parts")
        self.assertEqual(contents(self.home / "parts"), contents(self.home / "alone"))

    def test_damaged_parts_are_refused(self):
        def damaged(part):
            return part[:-1] + bytes([part[-1] ^ 1])

        for change in (damaged, lambda part: part[:-1], lambda part: b""):
            with self.assertRaisesRegex(fracbit.Error, "part 0 came back damaged"):
                self.quantize("damaged", change)
            self.assertFalse((self.home / "damaged").exists())

    def test_the_plan_in_the_documentation_is_that_of_the_simulation(self):
        path = REPOSITORY / "crates/fracbit-python/examples/distributed.py"
        spec = spec_from_file_location("distributed", path)
        distributed = module_from_spec(spec)
        sys.modules["distributed"] = distributed
        spec.loader.exec_module(distributed)
        page = (REPOSITORY / "docs/distributed.md").read_text()
        self.assertIn(distributed.table(), page)
        self.assertIn(distributed.calibration_table(), page)
        one, four = distributed.simulate(1), distributed.simulate(4)
        self.assertTrue(one.hours / 4.5 < four.hours < one.hours, "more workers take less")
        self.assertAlmostEqual(sum(distributed.matrices()), 405.8e9, delta=0.1e9)


@unittest.skipUnless(HERE, "wants ray: pip install 'fracbit[ray]'")
class Lost(unittest.TestCase):
    def test_a_run_whose_cluster_is_lost_ends_and_is_continued(self):
        """The head and all machines of a cluster are killed in the middle."""
        with tempfile.TemporaryDirectory() as home:
            out, alone = Path(home, "out"), Path(home, "alone")
            fracbit.quantize(DEMO, alone, **HOW)
            line = [sys.executable, "-m", "fracbit", "quantize", str(DEMO), "-o", str(out), *FLAGS]
            env = {**os.environ, "RAY_gcs_rpc_server_reconnect_timeout_s": "3"}
            run = subprocess.Popen(
                [*line, "--ray=local"],
                env=env,
                stderr=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            drain = threading.Thread(target=run.communicate)
            drain.start()
            deadline = time.monotonic() + 120
            journal = None
            while time.monotonic() < deadline and run.poll() is None:
                journal = next(Path(home).glob("out.partial-*/journal"), None)
                if journal and len(journal.read_text().splitlines()) > 8:
                    break
                time.sleep(0.02)
            self.assertIsNone(run.poll(), "it was in the middle")
            for pid, command in descendants(run.pid):
                if "gcs_server" in command or "raylet" in command or "ray::" in command:
                    os.kill(pid, signal.SIGKILL)
            drain.join(120)
            self.assertNotIn(run.poll(), (None, 0))
            self.assertFalse(out.exists(), "nothing under the final name")
            done = program("quantize", DEMO, "-o", out, *FLAGS, "--resume")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(contents(out), contents(alone))


if __name__ == "__main__":
    unittest.main()
