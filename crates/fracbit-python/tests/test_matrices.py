"""Single matrices: what goes in, what comes out, what is refused."""

import unittest

import numpy as np

import fracbit


def gaussian(rows, cols, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32)


class Matrices(unittest.TestCase):
    def test_there_and_back(self):
        weights = gaussian(48, 96)
        for scheme, most in [("tcq-3", 0.03), ("vq-2.5", 0.08), ("nuq-8", 1e-3), ("int-4", 0.03)]:
            packed = fracbit.quantize_matrix(weights, scheme, effort="fast")
            back = fracbit.dequantize(packed)
            self.assertEqual(
                (back.shape, back.dtype, back.flags.c_contiguous), ((48, 96), np.float32, True)
            )
            error = float(((back - weights) ** 2).sum() / (weights**2).sum())
            self.assertLess(error, most, scheme)
            self.assertAlmostEqual(error, packed.relative_error, delta=1e-4 * error + 1e-7)
            self.assertEqual((packed.scheme, packed.shape), (scheme, (48, 96)))
            self.assertEqual(packed.bits_per_weight, 8 * packed.nbytes / weights.size)

    def test_any_layout_gives_the_same(self):
        wide = gaussian(64, 160)
        part = wide[::2, 16:144:2]
        want = fracbit.dequantize(fracbit.quantize_matrix(part.copy(), "nuq-3"))
        layouts = {
            "strided": part,
            "by columns": np.asfortranarray(part),
            "backwards": part[::-1, ::-1].copy()[::-1, ::-1],
            "other byte order": part.astype(">f4"),
            "double": part.astype(np.float64),
            "list": part.tolist(),
        }
        for name, layout in layouts.items():
            got = fracbit.dequantize(fracbit.quantize_matrix(layout, "nuq-3"))
            np.testing.assert_array_equal(got, want, name)
        frozen = part.copy()
        frozen.flags.writeable = False
        np.testing.assert_array_equal(
            fracbit.dequantize(fracbit.quantize_matrix(frozen, "nuq-3")), want
        )
        half = part.astype(np.float16)
        got = fracbit.dequantize(fracbit.quantize_matrix(half, "nuq-3"))
        want = fracbit.dequantize(fracbit.quantize_matrix(half.astype(np.float32), "nuq-3"))
        np.testing.assert_array_equal(got, want)

    def test_rotation_helps_where_columns_stand_out(self):
        weights = gaussian(32, 64)
        weights[:, 5] *= 30
        plain = fracbit.quantize_matrix(weights, "nuq-2", rotate=False).relative_error
        self.assertLess(fracbit.quantize_matrix(weights, "nuq-2").relative_error, plain)
        one, other = (fracbit.quantize_matrix(weights, "nuq-2", seed=seed) for seed in (1, 2))
        self.assertNotEqual(one.relative_error, other.relative_error)

    def test_moments_spare_the_output(self):
        weights = gaussian(64, 64)
        mix = gaussian(64, 64, seed=1)
        inputs = gaussian(512, 64, seed=2) @ mix
        moments = inputs.T @ inputs / len(inputs)

        def loss(packed):
            error = fracbit.dequantize(packed) - weights
            return float(np.einsum("ri,ij,rj->", error, moments, error))

        for rotate in (False, True):
            alone = loss(fracbit.quantize_matrix(weights, "nuq-3", rotate=rotate))
            aided = loss(fracbit.quantize_matrix(weights, "nuq-3", rotate=rotate, moments=moments))
            self.assertLess(aided, 0.8 * alone)

    def test_refusals_name_the_argument(self):
        weights = gaussian(16, 16)
        bad = weights.copy()
        bad[3, 4] = np.nan
        table = [
            (
                (weights[0], "tcq-3"),
                {},
                fracbit.ArgumentError,
                "weights: should be a matrix (rows, cols)",
            ),
            (
                (weights.astype(complex), "tcq-3"),
                {},
                fracbit.ArgumentError,
                "should be floats, got complex",
            ),
            ((np.array([["a"]]), "tcq-3"), {}, fracbit.ArgumentError, "should be floats"),
            ((weights, "tcq-5.5"), {}, fracbit.ArgumentError, "scheme: "),
            ((weights, "nope"), {}, fracbit.ArgumentError, "nope"),
            ((weights, "tcq-3"), {"effort": "some"}, fracbit.ArgumentError, "effort: "),
            (
                (weights, "tcq-3"),
                {"moments": np.eye(8)},
                fracbit.ArgumentError,
                "moments: should be (16, 16), got (8, 8)",
            ),
            ((weights, "tcq-3"), {"moments": -np.eye(16)}, fracbit.ArgumentError, "moments: "),
            ((bad, "nuq-3"), {"rotate": False}, fracbit.InputError, "`weights` (16x16, nuq-3)"),
            ((np.zeros((0, 16)), "nuq-3"), {}, fracbit.InputError, "at least one row"),
        ]
        for args, options, kind, words in table:
            with self.assertRaises(kind) as raised:
                fracbit.quantize_matrix(*args, **options)
            self.assertIn(words, str(raised.exception))
        self.assertTrue(issubclass(fracbit.ArgumentError, (ValueError, fracbit.Error)))
        with self.assertRaises(TypeError):
            fracbit.quantize_matrix(weights, "nuq-3", group=16)


if __name__ == "__main__":
    unittest.main()
