"""What every source owes: subclass, and give ``source`` and ``expected``."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest
import torch

from streamload.core.errors import ReadError, StreamloadError
from streamload.core.specs import Extent, contiguous_strides
from streamload.sources.base import Source
from tests.support.tiny import open_descriptors, same_bits


class SourceConformance:
    """Tests of the contract in ``streamload.sources.base``."""

    @pytest.fixture
    def source(self) -> Source:
        raise NotImplementedError

    @pytest.fixture
    def expected(self) -> Mapping[str, torch.Tensor]:
        """Every tensor's values."""
        raise NotImplementedError

    def test_the_catalog_describes_every_tensor(self, source, expected):
        from streamload.sources.blocks import torch_dtype

        assert set(source.catalog) == set(expected)
        for name, spec in source.catalog.items():
            assert spec.name == name
            assert spec.shape == tuple(expected[name].shape)
            assert torch_dtype(spec.dtype) == expected[name].dtype
            assert spec.nbytes == expected[name].numel() * expected[name].element_size()

    def test_tensor_gives_the_values_in_memory_of_their_own(self, source, expected):
        for name, values in expected.items():
            first, second = source.tensor(name), source.tensor(name)
            assert same_bits(first, values)
            assert first.is_contiguous()
            if first.numel():
                assert first.data_ptr() != second.data_ptr()
                first.zero_()  # writable, and nobody else's
                assert same_bits(source.tensor(name), values)

    def test_extents_hold_the_bytes_in_memory_order(self, source, expected):
        for name, spec in source.catalog.items():
            if spec.extent is None:
                continue
            assert spec.extent.nbytes == spec.nbytes
            buffer = bytearray(spec.nbytes)
            source.read_into(spec.extent, memoryview(buffer), tensor=name)
            flat = torch.empty(expected[name].numel(), dtype=expected[name].dtype)
            if buffer:
                flat = torch.frombuffer(buffer, dtype=expected[name].dtype)
            strides = spec.strides or contiguous_strides(spec.shape)
            assert same_bits(torch.as_strided(flat, spec.shape, strides), expected[name])

    def test_parts_of_extents_can_be_read(self, source, expected):
        for spec in source.catalog.values():
            if spec.extent is None or spec.extent.nbytes < 3:
                continue
            whole, part = bytearray(spec.extent.nbytes), bytearray(spec.extent.nbytes - 2)
            source.read_into(spec.extent, memoryview(whole))
            source.read_into(
                Extent(spec.extent.file, spec.extent.offset + 1, len(part)), memoryview(part)
            )
            assert part == whole[1:-1]

    def test_rows_are_read_end_to_end(self, source, expected):
        for spec in source.catalog.values():
            if spec.extent is None or spec.extent.nbytes < 12:
                continue
            whole, rows = bytearray(spec.extent.nbytes), bytearray(9)
            source.read_into(spec.extent, memoryview(whole))
            first = Extent(spec.extent.file, spec.extent.offset + 1, 3)
            source.read_rows(first, 4, memoryview(rows), tensor=spec.name)
            assert rows == whole[1:4] + whole[5:8] + whole[9:12]

    def test_rows_beyond_the_end_are_an_error(self, source, expected):
        spec = next(s for s in source.catalog.values() if s.extent is not None and s.nbytes)
        first = Extent(spec.extent.file, spec.extent.offset, 1)
        with pytest.raises(ReadError, match="expected 1 bytes") as info:
            source.read_rows(first, 1 << 40, memoryview(bytearray(2)), tensor=spec.name)
        assert info.value.tensor == spec.name

    def test_reading_beyond_the_end_is_an_error(self, source, expected):
        spec = next(s for s in source.catalog.values() if s.extent is not None and s.nbytes)
        beyond = Extent(spec.extent.file, spec.extent.offset + (1 << 40), 8)
        with pytest.raises(ReadError, match="expected 8 bytes") as info:
            source.read_into(beyond, memoryview(bytearray(8)), tensor=spec.name)
        assert info.value.tensor == spec.name

    def test_reads_from_threads_do_not_disturb_each_other(self, source, expected):
        wrong: list[str] = []

        def read() -> None:
            for _ in range(20):
                for name, spec in source.catalog.items():
                    if spec.extent is None:
                        continue
                    buffer = bytearray(spec.extent.nbytes)
                    source.read_into(spec.extent, memoryview(buffer))
                    if buffer != reference[name]:
                        wrong.append(name)

        reference = {}
        for name, spec in source.catalog.items():
            if spec.extent is not None:
                reference[name] = bytearray(spec.extent.nbytes)
                source.read_into(spec.extent, memoryview(reference[name]))
        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    def test_mapped_tensors_are_views_or_none(self, source, expected):
        for name, values in expected.items():
            view = source.mapped(name)
            if view is not None:
                assert same_bits(view, values)
                again = source.mapped(name)
                assert again.data_ptr() == view.data_ptr()

    def test_hints_change_nothing(self, source, expected):
        for name, spec in source.catalog.items():
            if spec.extent is not None:
                source.prefetch(spec.extent)
                source.release(spec.extent)
            assert same_bits(source.tensor(name), expected[name])

    def test_an_unchanged_source_says_so(self, source, expected):
        source.check_unchanged()

    def test_closing_twice_is_allowed_and_closes_everything(self, source, expected):
        name = next(iter(expected))
        view = source.mapped(name)
        source.tensor(name)
        source.close()
        source.close()
        if view is not None:
            assert same_bits(view, expected[name])  # mapped tensors stay valid
        del view  # Python's own mmap object holds a descriptor as long as it lives
        own = {spec.file for spec in source.catalog.values()}
        assert not own.intersection(open_descriptors())

    def test_it_is_a_context_manager(self, source, expected):
        with source as entered:
            assert entered is source
        assert isinstance(source.metadata, dict)

    def test_the_configuration_is_a_dict_or_none(self, source, expected):
        config, notices = source.config()
        assert config is None or isinstance(config, dict)
        assert isinstance(notices, tuple)

    def test_names_that_are_not_there_are_errors(self, source, expected):
        with pytest.raises((KeyError, StreamloadError)):
            source.tensor("no such tensor")
